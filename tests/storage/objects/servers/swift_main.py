"""OpenStack Swift with its S3 API in one process: swift_main.py FOLDER. Run by the Python of an environment that has Swift.

Prints the port when it is up. Keys: test:tester / testing. Not for commits: its conditional PUT lets several win.
"""

import getpass
import sys
from pathlib import Path

import eventlet

eventlet.monkey_patch()

from eventlet import wsgi  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.wsgi import loadapp  # noqa: E402

PARTS = ("account", "container", "object")
SERVER = """[DEFAULT]
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
recon_cache_path = {folder}
fallocate_reserve = 0
[pipeline:main]
pipeline = {part}-server
[app:{part}-server]
use = egg:swift#{part}
"""
PROXY = """[DEFAULT]
user = {user}
swift_dir = {folder}
[pipeline:main]
pipeline = catch_errors cache bulk s3api tempauth versioned_writes symlink slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
allow_account_management = true
[filter:cache]
use = egg:swift#memcache
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:bulk]
use = egg:swift#bulk
[filter:versioned_writes]
use = egg:swift#versioned_writes
allow_object_versioning = true
[filter:symlink]
use = egg:swift#symlink
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
user_test_reader = reading
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
"""


class Silent:
    def write(self, text: str) -> None:
        pass


def main(folder: Path) -> None:
    (folder / "devices" / "d1").mkdir(parents=True)
    (folder / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = x\nswift_hash_path_prefix = y\n"
        "[storage-policy:0]\nname = p0\ndefault = yes\n"
    )
    sockets = {part: eventlet.listen(("127.0.0.1", 0)) for part in (*PARTS, "proxy")}
    settings = {"user": getpass.getuser(), "folder": folder}
    for part in PARTS:
        builder = RingBuilder(2, 1, 0)
        port = sockets[part].getsockname()[1]
        device = {
            "region": 1,
            "zone": 1,
            "ip": "127.0.0.1",
            "port": port,
            "device": "d1",
            "weight": 1.0,
            "meta": "",
        }
        builder.add_dev(device | {"replication_ip": "127.0.0.1", "replication_port": port})
        builder.rebalance()
        builder.get_ring().save(str(folder / f"{part}.ring.gz"))
        (folder / f"{part}.conf").write_text(SERVER.format(part=part, **settings))
    (folder / "proxy.conf").write_text(PROXY.format(**settings))
    import swift.common.utils

    swift.common.utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    swift.common.utils.validate_hash_conf()
    for part in (*PARTS, "proxy"):
        app = loadapp(str(folder / f"{part}.conf"))
        eventlet.spawn(wsgi.server, sockets[part], app, Silent(), max_size=256)
    print(sockets["proxy"].getsockname()[1], flush=True)
    eventlet.event.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
