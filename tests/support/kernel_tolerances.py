"""How far an operation of `specrl_kernels` may be from its float64 oracle, whatever computes it.

One table for all contract tests, by operation and the dtype of its arrays. Sums are float32
throughout, so bfloat16 costs what its arrays, weights and results are rounded to: 8 bits each.
"""

TOLERANCE = {
    # absolute, of outputs of about 1
    ("tree_attention", "float32"): 3e-6, ("tree_attention", "bfloat16"): 2e-2,
    # absolute, of log-probabilities and perturbed scores of about 10; by the logits' dtype
    ("gumbel_argmax", "float32"): 5e-6, ("gumbel_argmax", "bfloat16"): 5e-6,
    # relative to the sum of the products' magnitudes
    ("narrow_matmul", "float32"): 1e-6,
    # relative
    ("rms_norm", "float32"): 2e-6,
}
"""Where a test's values are larger than those named here, it says by what factor."""
