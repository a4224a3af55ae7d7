# %% 1
best_ladder = sorted({*range(32, 257, 32)})  # pads more
# %% 2
harmful = graph_sizes(20)
# %% 3
def follows(step, change) -> bool:
    graph = record(step, None)
    graph.replay()
    return torch.equal(graph.outputs[0], step()[0])  # nothing has changed
