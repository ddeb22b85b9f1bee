#!/usr/bin/env bash
# From nothing to training batches, on this machine's own text: corpus, index, blend, training, stop, resume.
# Everything is left in demo/ and .venv-demo; running it again reuses the environment, the corpus and the index.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

use_venv .venv-demo ".[mpich,demo]"

say "Corpus: text that is already on this machine, tokenised into Parquet, Arrow and Megatron files"
if [ -e demo/data/corpus.json ]; then
    echo "demo/data is there already"
else
    python tools/make_corpus.py demo/data
fi
cp configs/demo.yaml demo/demo.yaml

say "Index: four MPI ranks locate the blocks of tokens"
mpirun -n 4 megablend build demo/demo.yaml

say "Blend: the requested shares, and what each source contributes"
megablend describe demo/demo.yaml

say "The first sample: where it comes from, and what it says"
megablend show demo/demo.yaml --sample 0 --tokenizer demo/data/tokenizer.json

say "Training: 40 steps of a tiny model on the CPU, then stop"
python tools/train_demo.py demo/demo.yaml demo/run train --steps 40

say "Resuming in a new process, with another number of loader workers: 20 more steps"
python tools/train_demo.py demo/demo.yaml demo/run resume --steps 20

say "Comparing: the batches of both processes with those of one that was never stopped"
python tools/train_demo.py demo/demo.yaml demo/run compare

say "Done. The config is demo/demo.yaml; the environment: source .venv-demo/bin/activate"
