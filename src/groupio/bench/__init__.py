"""``groupio bench``: groupio beside its peers and the physical limits, measured in one run.

Every rank is a real process of one gloo group. All systems save the same tensors, epoch by epoch
in turn, each into a directory of its own on the same file system; the limits are measured by the
same processes next to them. docs/benchmark.md says what each figure means.

The command line and :mod:`groupio.bench.launch` run without torch; what a rank runs needs it.
"""
