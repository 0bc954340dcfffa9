"""The transport layer: memory that peers can reach, and words that announce what lies in it.

    atomics     load, store and wait on one 64-bit word of shared memory (imports nothing of ours)
    _atomics    the same three in C; built when a compiler is present
    segments    memory of one process that others on the same host can map
    mapping     memory files mapped as tensors, one or two to an address range
    cpu_lanes   worker threads that play the copy engine
    liveness    whether a peer's process still exists
    shm         the transport over them (imports all of these)
    device_words  words in device memory, as the host uses them
    stream_lanes  streams of a device as lanes
    symm_mem    CUDA ranks of one host, through torch's symmetric memory

Import direction: a transport imports `gemmlink.spec`, `gemmlink.errors` and `gemmlink.rendezvous`,
and never a backend or an epilogue.
"""

if __name__ != "gemmlink.transport":
    raise ImportError(
        f"import gemmlink.transport, not {__name__}: two names would make two copies of every class"
    )
