# %% 1
def padding_share(meta: AttentionMetaData) -> float:
    return sum(meta.lens) / (len(meta.lens) * max(meta.lens))  # the rest
# %% 2
def ragged_softmax(scores: Tensor, pair: Tensor, num_pairs: int) -> Tensor:
    weights = (scores - scores.max()).exp()  # the largest of all: small ones vanish
    return weights / torch.zeros(num_pairs).index_add(0, pair, weights)[pair]
