"""Classes of operators and kernels: GEMM, attention, norms and other elementwise work, optimiser, ...

On a GPU a kernel belongs to the operator that launched it, or where that is not known (a CUDA graph, a
compiled kernel) to the class of its own name.
"""

import re
from functools import cache

from traces.events import DATA, Event

GEMM, ATTENTION, ELEMENTWISE = "GEMM", "attention", "norm, elementwise"
OPTIMIZER, COMMUNICATION, COPIES = "optimiser", "communication", "copies"
DATA_WAIT, AROUND, IDLE = "data wait", "log, save, validate", "idle"
COMPUTE = (GEMM, ATTENTION, ELEMENTWISE, OPTIMIZER, COPIES)  # what communication can hide behind
CLASSES: tuple[str, ...] = (*COMPUTE, COMMUNICATION, DATA_WAIT, AROUND, IDLE)

# The parts of the loop (train.py's spans) that count as a whole, whatever runs in them.
WHOLE_PARTS = {DATA: DATA_WAIT, "log": AROUND, "checkpoint": AROUND, "validation": AROUND}

# Names of operators without "aten::", the first that matches from its beginning. A matrix multiplied in
# batches is attention here: linear layers and patches are plain GEMMs (mm, addmm).
OPERATORS = [
    (COMMUNICATION, r"c10d::|_c10d_functional::|rossby::swap_strips"),
    (OPTIMIZER, r"_fused_(adamw?|sgd|adagrad)_"),
    (ATTENTION, r".*(scaled_dot_product|_attention|attn)|_?softmax|baddbmm|bmm$"),
    (GEMM, r"_?(scaled_|int_)?mm$|_?addmm|addmv|mv$|dot$|mkldnn_(linear|rnn_layer)|(.*_)?convolution"),
    (COPIES, r"(_foreach_)?copy_|clone|contiguous|cat$|stack|to$|_to_copy|pad$|constant_pad|repeat|roll"),
    (COPIES, r"flip|split_with_sizes_copy|_chunk_cat|index_select|pin_memory|fsdp::"),
]
# Operators that only look at a tensor, allocate one, or hand on to another: their own time is the host's.
HOST = re.compile(
    r"(_unsafe_)?view|_?reshape|t$|transpose|permute|expand|as_strided|detach|select$|slice$|narrow|unflatten"
    r"|(un)?squeeze|unbind|chunk|split(_with_sizes)?$|alias|(new_)?empty|resize|resolve_|lift|item|is_nonzero"
    r"|_local_scalar|linear$|matmul|conv(_transpose)?[123]d$|set_|record_stream|result_type|flatten|movedim"
    r"|zeros?(_like)?$|ones(_like)?$|full(_like)?$|arange|scalar_tensor|tensor_split|size$|stride|numel|is_pinned"
    r"|einsum|tensordot|inner$|bilinear|(lstm|gru|rnn_tanh|rnn_relu)$"
)
OPERATOR_RULES = [(name, re.compile(pattern)) for name, pattern in OPERATORS]

# Names of kernels, where the operator is not known.
KERNELS = [
    (COMMUNICATION, r"nccl|all_?reduce|all_?gather|reduce_?scatter|multimem|symm_mem"),
    (ATTENTION, r"flash|fmha|attention|sdpa|softmax"),
    (GEMM, r"gemm|cutlass|cublas|nvjet|wgmma|xmma|_mm(_|$)|addmm|conv|winograd|cudnn"),
    (OPTIMIZER, r"multi_tensor_apply|adam"),
    (COPIES, r"memcpy|memset|copy_kernel|CatArray|copy_device_to_device"),
]
KERNEL_RULES = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in KERNELS]
COMPILED = ("## Call CompiledFxGraph", "triton_", "graph_")  # inductor's code: what it runs itself was fused
SYNCHRONISE = re.compile(r"(cuda|hip)(Device|Stream|Event)Synchronize|(cuda|hip)Memcpy$")


@cache
def operator_class(name: str) -> str | None:
    """Return the class of an operator by its name; None for one that computes nothing itself."""
    if "::" not in name or name.startswith(("autograd::", "torch::")):
        return None
    short = name.removeprefix("aten::")
    other = None if HOST.match(short) else ELEMENTWISE
    return next((found for found, pattern in OPERATOR_RULES if pattern.match(short)), other)


def working_operator(event: Event | None) -> tuple[str | None, Event | None]:
    """Return the class of the work inside `event`, and the operator that does it: the outermost one that
    computes (the bias copied inside addmm is GEMM), unless it is inside the optimiser's step.
    """
    name, operator, in_optimizer = None, None, False
    for outer in event.chain() if event else ():
        if outer.kind == "op" and (found := operator_class(outer.name)):
            name, operator = found, outer
        in_optimizer = in_optimizer or outer.name.strip("# ").startswith(("optimizer", "Optimizer.step#"))
    if name is None and event and event.name.startswith(COMPILED):  # fused, or a GEMM or softmax by its name
        own = kernel_class(event.name)
        is_product = own in (GEMM, ATTENTION) and not event.name.startswith("##")
        name, operator = own if is_product else ELEMENTWISE, event
    if in_optimizer and name not in (None, COMMUNICATION):
        name = OPTIMIZER
    return name, operator


def kernel_class(name: str) -> str:
    """Return the class of a kernel by its own name."""
    return next((found for found, pattern in KERNEL_RULES if pattern.search(name)), ELEMENTWISE)


def classify_kernel(kernel: Event, launch: Event | None) -> tuple[str, Event | None]:
    """Return the class of a kernel or copy on the GPU, and the operator that launched it."""
    named = kernel_class(kernel.name)
    if any(WHOLE_PARTS.get(outer.name) == AROUND for outer in (launch.chain() if launch else ())):
        return AROUND, None
    if named == COMMUNICATION:
        return COMMUNICATION, None
    found, operator = working_operator(launch)
    if found is None or found == COMMUNICATION:  # launched by a collective, besides its own kernel
        return (COPIES if kernel.kind == "copy" else named), None
    return found, operator
