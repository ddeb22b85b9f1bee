"""Package metadata; the tools' settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="megablend",
    version="0.1.0",
    description="Index builder and blended sampler for LLM pretraining: token files in, exactly resumable batches out",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megablend", "megablend.*"]),
    package_data={"megablend": ["py.typed"], "megablend.inspect.html": ["page.css", "page.js"]},
    install_requires=[
        "click>=8.1",
        "numba>=0.60",
        "numpy>=1.26",
        "pyarrow>=15.0",
        "pydantic>=2.6",
        "pyyaml>=6.0",
        "rich>=13.0",
        "torch>=2.6",
    ],
    extras_require={
        "mpi": [
            "mpi4py>=4.1"
        ],  # for the MPI library that the machine has; Lightning imports mpi4py where it finds it
        "mpich": ["mpi4py>=4.1", "mpich>=4.2"],
        "objects": ["obstore>=0.11.1"],
        "demo": ["tokenizers>=0.20"],
        "html": ["matplotlib>=3.8"],
        "prometheus": ["prometheus-client>=0.20"],
        "test": [
            "accelerate>=1.0",
            "botocore>=1.34",
            "coverage>=7.4",
            "hypothesis>=6.100",
            "lightning>=2.4",
            "matplotlib>=3.8",
            "megatron-core==0.16.1",
            "mypy>=1.10",
            "obstore>=0.11.1",
            "packaging",
            "prometheus-client>=0.20",
            "pytest>=8.0",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "ruff>=0.6",
            "setuptools>=68",
            "tokenizers>=0.20",
            "torchdata>=0.11",
            "transformers>=4.50",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["megablend = megablend.cli:main"]},
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
