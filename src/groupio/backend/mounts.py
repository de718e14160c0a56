"""The file system of a directory, and whether it outlives this node."""

from __future__ import annotations

UNKNOWN = "unknown"

_SHARED = frozenset(
    (
        *("nfs", "nfs4", "cifs", "smb3", "afs", "coda", "ceph", "lustre", "gpfs", "beegfs"),
        *("glusterfs", "ocfs2", "gfs2", "orangefs", "pvfs2", "panfs", "wekafs", "quobyte"),
        *("fuse.ceph", "fuse.glusterfs", "fuse.juicefs", "fuse.quobyte", "fuse.moosefs"),
        *("fuse.dfuse", "fuse.sshfs", "fuse.mfs", "fuse.seaweedfs"),
    )
)


def filesystem_type(fd: int) -> str:
    """The type of the file system that ``fd`` is on, such as "ext4"; "unknown" without /proc."""
    return _mount(fd)[0]


def keeps_modes(fd: int) -> bool:
    """Whether somebody compares the mode of files on the file system of ``fd`` with the caller.

    False for mounts that serve every user of the machine with the rights of the one who mounted.
    """
    kind, options = _mount(fd)
    if kind == "fuse" or kind.startswith("fuse."):
        return "allow_other" not in options or "default_permissions" in options
    return not (kind in ("cifs", "smb3") and "noperm" in options)


def _mount(fd: int) -> tuple[str, frozenset[str]]:
    """The type of the mount that ``fd`` is on, and the options of its file system."""
    try:
        mount = _mount_id(fd)
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                fields = line.split()
                if fields[0] == mount:
                    kind, _, options = fields[fields.index("-") + 1 :][:3]
                    return kind, frozenset(options.split(","))
    except (OSError, ValueError, IndexError):
        pass  # without /proc nothing is known
    return UNKNOWN, frozenset()


def _mount_id(fd: int) -> str:
    # Device numbers do not find the mount: btrfs and overlay report others than mountinfo.
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return line.split()[1]
    raise ValueError("no mount id")


def is_node_local(filesystem: str) -> bool:
    """False only for file systems known to rest on other machines.

    An unknown type counts as local, because then no ack claims to survive the loss of the node.
    """
    return filesystem not in _SHARED
