"""Constants of the planner that no machine of clusters.toml has, each with its source.

A unit is the tokens of a micro-batch that a rank has between blocks x width x bytes of a value.
"""

FLOAT32 = 4  # bytes
GIB = 2**30

# Reserved memory over what tensors need at the peak, less 1: 15 % is the allocator's fragmentation (GMLake,
# arXiv 2401.08156), and what 17 of 20 peaks of TorchTitan's tables need.
ALLOCATOR_SLACK = 0.15

# -- kernels
# clusters.toml has the rate of the best of many shapes, alone on a cool device. Of a step's products a device
# at its power limit reaches less, their outputs are written, and exchanges are copied into order: 0.85 has
# the smallest median error over published steps (benchmarks/planner_published.py: 0.95 with terms for each
# of these was 6 % too fast), and 54 further steps helped to choose it.
REACHED = 0.85
# Bytes a score that "math" attention moves between its products, forward and backward (models/attention.py):
# the scores divided (two numbers), their softmax (two; backward three) and its way from and to half
# precision, since autocast takes the softmax in float32.
SCORE_BYTES = {False: (16, 20), True: (24, 28)}  # keyed by half precision
# float8: a product's input is read for its maximum and again to be cast (2 + 2 + 1 bytes of 2), its gradient
# too; each is then transposed for the gradient of weights (1 + 1). Kernels that the compiler makes of
# torchao's casts reach 0.62 of the bandwidth: vit1b's, profiled by benchmarks/gpu.sh on an H100.
FLOAT8_CAST, FLOAT8_TRANSPOSE, FLOAT8_BANDWIDTH = 2.5, 1.0, 0.62
# Units that a block reads and writes, by (compiled, backward), without its MLP's activation: two norms, two
# sums of the residual stream, fused where compiled; backward also the gradients of q, k and v put together.
PASSES = {
    (False, False): {"layer_norm": 4.0, "add": 6.0},
    (False, True): {"layer_norm_backward": 6.0, "add": 6.0, "copy": 12.0},
    (True, False): {"layer_norm": 8.0},
    (True, True): {"layer_norm_backward": 8.0},
}
ACTIVATION_PASSES = {False: ("gelu", 2), True: ("gelu_backward", 3)}  # of the MLP's hidden values
# Autocast on a GPU takes uncompiled norms in float32: units that two of them read and write more, forward and
# backward: 16 and 18 bytes a value of 2 (cast there and back, and twice as wide between).
NORM_CASTS = (16, 18)
# Reads and writes of the predicted float32 fields of a sample, as training/objective.py makes them, operator
# by operator: normalising two dates 15, the change 5, weights 8, inputs 2, patches of three 6, loss 9 and its
# gradient 10. Compiled: three are read (the truth twice, once for its mask) and three written; loss 2.5, its
# gradient 3. The second figure is of an older state of a window; CRPS (PAIR_PASSES) is not compiled: for each
# other member difference, size and sum, twice.
FIELD_PASSES = {False: (55, 11.5), True: (11.5, 2)}
PAIR_PASSES = 14

# Operators that Python launches in a block, forward and backward, by compiled, and what FSDP adds to each; a
# launch takes 10 us on a fast host (H100), 28 us on the H200's that benchmarks/gpu.sh ran on, where a forward
# pass of 48 blocks took 60 ms: 44 operators a block. A model so small that its kernels take less waits.
OPERATORS, FSDP_OPERATORS, LAUNCH = {False: (44, 88), True: (12, 24)}, 20, 10e-6

# -- the update
# Bytes a parameter: AdamW reads parameter, gradient and two moments and writes three of them. LAMB's
# direction takes as much, its weight decay 12, norms 8, the step 12. SGD's step takes 20, weight decay 12.
# LARS has norms (8) and scaling (8), too. Muon goes through its matrices seven times. The norm of gradients
# takes 4 and clipping 8; averaged weights 12.
UPDATE_BYTES = {"AdamW": 28, "LAMB": 60, "SGD": 32, "LARS": 48, "Muon": 28}
MUON_BYTES, CLIP_BYTES, AVERAGE_BYTES = 70, 12, 12
ITERATIONS = 5  # of Newton and Schulz: training/optimizers/muon.py

# -- ranks
# "5 % and higher differences" between accelerators of a node (github.com/stas00/ml-engineering, "Not all
# accelerators are created equal"): the slowest of 8, for which all wait, over the fastest.
SPREAD, NODE = 0.05, 8
# Collectives take 24 of an H100's 132 multiprocessors (a profile of FSDP's all-gather in
# forums.developer.nvidia.com/t/337991): what computes meanwhile takes longer on the rest. NCCL opens as many
# channels as its links can use: slower ones take fewer.
NCCL_SLOWDOWN = 24 / (132 - 24)
BUCKET = 25 * 2**20  # bytes of gradients that DDP reduces at once
