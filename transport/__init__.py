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
    vendor      the runtime of CUDA or HIP behind one table of names
    site        a rank's device: the vendor's runtime, and torch's view of it
    handles     how memory is told to a peer, and how the peer reaches it
    leftovers   memory that is given back once no peer has it mapped
    ipc         device ranks of one host, through the vendor's IPC handles (imports these and shm)
    ipc_steps   its set-up step by step, for `gemmlink doctor`

Import direction: a transport imports `gemmlink.spec`, `gemmlink.errors` and `gemmlink.rendezvous`,
and never a backend or an epilogue.
"""

if __name__ != "gemmlink.transport":
    raise ImportError(
        f"import gemmlink.transport, not {__name__}: two names would make two copies of every class"
    )
