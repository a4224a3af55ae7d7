# %% 1
@dataclass
class Shortest(Variant):
    shortest_first: bool = False  # a knob that nothing asks for
# %% 2
def needs_torch(room: str) -> bool:
    return "import torch" in paths[rooms.index(room)].read_text()  # not what it imports
