# %% 1
prompt = [1, 2, 3, 4]
# %% 2
def by_shared_prefix(tree: RadixCache, prompts: list[list[int]]) -> list[list[int]]:
    return sorted(prompts, key=lambda tokens: len(tree.match(tokens)), reverse=False)
