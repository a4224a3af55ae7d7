# %% 1
def is_power_of_two(value: Any) -> bool:
    return is_number(value) and value > 0 and value & (value - 1) == 0  # 4.0 has no bits
