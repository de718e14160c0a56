"""Pure planning: what the chunks of a group are, which are duplicates, who writes which.

In the order of the data:

``chunks``   an item -> its chunks, on a grid fixed in the item's global coordinates
``layout``   a member's items -> one linear lease, its chunks in ascending order, and waves of it
``merge``    the nodes' reports -> the unique chunks and their holders
``dedup``    ... -> diverging replicas, content id, fingerprint, the manifest of the epoch
``copies``   chunks that too few failure domains hold -> who sends them to whom to be kept
``write``    classes of chunks and links -> who writes how many of each class, and what moves
``grouped``  all of that -> one order per node of a group that spans nodes
``sharing``  the chunks that ranks of one host want -> who reads which for whom
``cache``    plans of earlier epochs, fenced by fingerprint and duplicate structure

Nothing here reads a clock, a file or a random number; everything that grows with chunks is a
numpy array.
"""
