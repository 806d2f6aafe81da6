"""Bytes that no shape tells: what libraries, allocators and CUDA were measured to take."""

# --- constants, in bytes --------------------------------------------------------------------------

PYTHON_BYTES = 830_000_000
"""Resident in a process on a CPU: Python, torch and transformers. Of runs on two cores
(docs/plan_measured.md)."""

RANK_LIBRARY_BYTES = 120_000_000
"""Resident in a process on a CPU: what only ranks, adapters and layers that are computed twice
load. Of the same runs."""

BFLOAT16_BYTES = 100_000_000
"""On a CPU: oneDNN's compiled kernels, where products are in bfloat16. Of the same runs."""

BFLOAT16_PASSING_BYTES = 3 * BFLOAT16_BYTES
"""On a CPU: what comes and goes at least beside products in bfloat16. Of the same runs."""

CUDA_CONTEXT_BYTES = 800_000_000
"""On a GPU: CUDA's context of one process. Of an H200 (docs/gpus.md)."""

GRAPH_BYTES = 650_000_000
"""On a GPU: captured CUDA graphs of a vLLM engine that sleeps, and what its kernels keep. An H200
had 1.43 GB less free after an engine of 1.5 billion parameters had started and slept, its context
among them; 1.25 GB with 0.4 billion."""

WORKSPACE_BYTES = 8 * 4096 * 1024
"""In torch's allocator: cuBLAS's workspace on a Hopper GPU, 8 times 4096 KiB by torch's
aten/src/ATen/cuda/CublasHandlePool.cpp."""

# --- constants, as shares -------------------------------------------------------------------------

RESERVED_SHARE = 0.012
"""On a GPU, of all that the trainer allocates: blocks that torch's allocator keeps without handing
them out. Of an update of 72.43 GB on an H200 the driver counted 75.45, of which 1.43 are an
engine's that sleeps, and 0.8 the trainer's context."""

UNUSED_BLOCK_SHARE = 0.005
"""On a GPU, of what comes and goes in a phase: torch's allocator leaves up to 1 MiB of a block
unused."""

HEAP_HOLES_OF_UPDATE = 0.19
"""On a CPU, of what comes and goes in an update: holes in malloc's heap. They grow with the
allocations that live for a moment only. Fitted, as the four below, to the runs of
docs/plan_measured.md."""

HEAP_HOLES_OF_RANK_UPDATE = 0.65
"""The same in a rank, which gathers layers for a moment."""

HEAP_HOLES_OF_ADAPTER_UPDATE = 0.43
"""The same with adapters."""

HEAP_HOLES_OF_RECOMPUTED_UPDATE = 1.0
"""The same where layers are computed twice."""

HEAP_HOLES_OF_OTHER_PHASES = 0.5
"""The same in all phases but the update."""

SPARE = 0.05
"""Of a card: what a plan leaves to fragmentation."""
