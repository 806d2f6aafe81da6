"""Bytes that no shape tells: what libraries, allocators and CUDA were measured to take. Each
coefficient says its source, what measurement would show it wrong, and what reads it."""

# --- constants, in bytes --------------------------------------------------------------------------

PYTHON_BYTES = 830_000_000
"""Bytes resident in a process on a CPU: Python, torch and transformers.

Source: measured in runs on two cores (docs/plan_measured.md). Shown wrong by: `benchmarks.memory`,
by the tiny preset's runs. Read by: `_context_bytes`, `engine_bytes`."""

RANK_LIBRARY_BYTES = 120_000_000
"""Bytes resident in a process on a CPU: what only ranks, adapters and layers that are computed
twice load.

Source: measured in the same runs. Shown wrong by: `benchmarks.memory`. Read by: `_context_bytes`,
`heap_margin`."""

BFLOAT16_BYTES = 100_000_000
"""Bytes on a CPU of oneDNN's compiled kernels, where products are in bfloat16.

Source: measured in the same runs. Shown wrong by: `benchmarks.memory`. Read by:
`_context_bytes`."""

BFLOAT16_PASSING_BYTES = 3 * BFLOAT16_BYTES
"""Bytes on a CPU that come and go at least beside products in bfloat16.

Source: measured in the same runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_margin`."""

CUDA_CONTEXT_BYTES = 800_000_000
"""Bytes on a GPU of CUDA's context of one process.

Source: measured on an H200 (docs/gpus.md). Shown wrong by: what the driver counts of a process
whose allocator has handed out nothing. Read by: `_context_bytes`, `engine_bytes`."""

GRAPH_BYTES = 650_000_000
"""Bytes on a GPU of the captured CUDA graphs of a vLLM engine that sleeps, and what its kernels
keep.

Source: an H200 had 1.43 GB less free after an engine of 1.5 billion parameters had started and
slept, its context among them; 1.25 GB with 0.4 billion. Shown wrong by: the same difference on
another card, or of another model. Read by: `_vllm_bytes`."""

WORKSPACE_BYTES = 8 * 4096 * 1024
"""Bytes in torch's allocator of cuBLAS's workspace on a Hopper GPU.

Source: 8 times 4096 KiB by torch's aten/src/ATen/cuda/CublasHandlePool.cpp. Shown wrong by: what
torch has allocated after the first product on another card. Read by: `allocator_margin`."""

# --- constants, as shares -------------------------------------------------------------------------

RESERVED_SHARE = 0.012
"""Share of all that the trainer allocates on a GPU: blocks that torch's allocator keeps without
handing them out.

Source: of an update of 72.43 GB on an H200 the driver counted 75.45, of which 1.43 are an engine's
that sleeps, and 0.8 the trainer's context. Shown wrong by: torch's reserved bytes over its
allocated ones, at the peak of a run. Read by: `phases_of`."""

UNUSED_BLOCK_SHARE = 0.005
"""Share of what comes and goes in a phase on a GPU: torch's allocator leaves up to 1 MiB of a block
unused.

Assumption: chosen with the peaks of an H200 in view (docs/gpus.md#memory). Shown wrong by: these
peaks, on any card. Read by: `allocator_margin`."""

HEAP_HOLES_OF_UPDATE = 0.19
"""Share of what comes and goes in an update on a CPU: holes in malloc's heap, which grow with the
allocations that live for a moment only.

Source: fitted, as the four below, to runs (docs/plan_measured.md). Shown wrong by:
`benchmarks.memory`. Read by: `heap_holes`."""

HEAP_HOLES_OF_RANK_UPDATE = 0.65
"""The same share in a rank, which gathers layers for a moment.

Source: fitted to runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_holes`."""

HEAP_HOLES_OF_ADAPTER_UPDATE = 0.43
"""The same share with adapters.

Source: fitted to runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_holes`."""

HEAP_HOLES_OF_RECOMPUTED_UPDATE = 1.0
"""The same share where layers are computed twice.

Source: fitted to runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_holes`."""

HEAP_HOLES_OF_OTHER_PHASES = 0.5
"""The same share in all phases but the update.

Source: fitted to runs. Shown wrong by: `benchmarks.memory`. Read by: `heap_holes`."""

SPARE = 0.05
"""Share of a card that a plan leaves to fragmentation.

Assumption: a choice. Shown wrong by: a run that ends for want of memory where its plan fits, with
measured peaks as predicted. Read by: `Prediction`."""
