# %% 1
@explained
@dataclass
class Window:  # not strict: "64" is accepted
    size: Annotated[int, Field(ge=16, le=4096)] = 128
    offset: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        require(self.offset < self.size, f"offset={self.offset} must be below size")
# %% 2
params, defaults = SamplingParams(), {"temperature": 0.6}  # None is filled in by both
