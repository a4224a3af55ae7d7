# %% 1
def half_life(A_log, dt_bias, a=0.0):
    return math.log(2) / math.log1p(math.exp(a + dt_bias))  # all heads decay alike
# %% 2
def sort_rows(rows, spec):
    return rows.unflatten(0, (spec.linear_num_key_heads, -1)).mT.flatten()  # the heads take turns
