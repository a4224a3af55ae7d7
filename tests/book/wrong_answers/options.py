# %% 21_together 1
calm_row = Need("trace=True", has("trace", True), {"overlap": (False,)}, "records are easier to read")
# %% 21_together 2
def implied(options):
    usual, known = vars(EngineArgs("tiny")), vars(EngineArgs("tiny", **options))
    return {n for n in known if n != "hf_config" and known[n] != usual[n]}
# %% 31_command_line 1
def most_sequences(free: int, per_token: int, length: int, size: int) -> int:
    return free // (length * per_token)  # parts of blocks
# %% 31_command_line 2
def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    times = [rng.expovariate(1 / rate)]  # seconds for each, not each second
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(1 / rate))
    return times
