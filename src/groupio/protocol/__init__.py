"""The group protocol as pure state machines: ``handle(event) -> effects``.

* :mod:`.messages` is what ranks and agents say to each other over the local socket;
* :mod:`.events` is what happens to the machines: messages, failures, timers, answers of the store;
* :mod:`.effects` is what the machines ask their driver to do;
* :mod:`.group` decides one group, :mod:`.controller` one job, :mod:`.agent` one node's memory.

Nothing here reads a clock, opens a file or starts a thread. A driver executes effects in the
order given and feeds results back as events; the same machines run under a simulator.
"""
