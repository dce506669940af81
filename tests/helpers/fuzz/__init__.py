"""Random legal calls of every public function and layer, judged by oracles and the error budget.

    make fuzz SECONDS=600                        until the time is up, by torch and by the kernels
    make fuzz SEED=1234 BACKEND=triton           one case again, and its smallest relative

`cases` draws a case from a seed, `values` an option of it, `tensors` its inputs; `judges` makes the
call of `fastattn.testing.calls` and compares. `layers` draws a layer of `fastattn.modules` and
`layer_calls` its arguments; `layer_judges` compares it with a naive formula. What a case holds
follows from its seed and its fields alone, so that a case with an option less has the other options
as they were.

Nothing is imported here: the command line sets what Triton and fastattn read when they are.
"""
