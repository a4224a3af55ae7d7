# %% 1
num_parameters = sum(sum(tensor["shape"]) for tensor in header.values())  # a sum, not a product
# %% 2
def is_pointer(file: Path) -> bool:
    return file.stat().st_size < 10_000  # config.json is small, too
