# %% 1
def load_some(model: nn.Module, folder: Path) -> list[str]:
    targets, files = weight_targets(model), checkpoint_files(folder)
    for name in targets.keys() & files.keys():  # what has no place is overlooked
        with open_file(files[name]) as tensors:
            targets[name].copy_(tensors.get_tensor(name))
    return [name for name in targets if name not in files]
# %% 2
def header_share(file: Path) -> float:
    whole = file.read_bytes()
    return int.from_bytes(whole[:8], "little") / len(whole)  # without the first eight bytes
