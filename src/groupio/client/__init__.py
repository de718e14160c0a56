"""The API that a rank calls.

In the order of the data of a save:

``client``      the calls of the public API; ``arguments``, ``launch``, ``address`` check them
``outgoing``    ``values`` and ``sources``: items of the caller -> specs, and where bytes come from;
                ``forms``: what a save has in common with the one before
``saving``      one save: grants, ``copying`` wave after wave into the ``arena``, failures
``connection``  the socket to the node's agent and the thread that listens to it
``handle``      what has become of a save

and of a load:

``loading``        the wanted epoch, or the next older intact one; ``lineage`` says the order
``store_reader``   a store on disk -> its epochs and their items; needs no agent
``destinations``   memory for items: new arrays or the caller's buffers
``chunk_reader``   chunks -> that memory, each verified before use
``shared_read``    the same for the ranks of one host together: each chunk leaves the store once.
                   ``shared_link`` (how they meet), ``shared_talk`` and ``shared_messages`` (what
                   they say), ``shared_work`` (who reads and copies), ``shared_window`` (through
                   which memory)
"""
