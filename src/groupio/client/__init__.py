"""What a rank calls.

In the order of the data of a save:

``client``      arguments -> a group's save, and the calls of the public API
``values``      items of the caller -> specs and sources of bytes
``copying``     sources -> the bytes of a wave, in the arena
``arena``       the rank's mappings of its leases
``connection``  the socket to the node's agent and the thread that listens to it
``handle``      what has become of a save

and of a load:

``store_reader``   a store on disk -> its epochs and their items; needs no agent
``chunk_reader``   chunks -> memory, each verified before use
``destinations``   memory for items: new arrays or the caller's buffers
``lineage``        which epochs ``latest`` and a number mean
"""
