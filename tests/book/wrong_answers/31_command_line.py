# %% 1
def start(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system or ""}]
# %% 2
def arrivals(count: int, rate: float, rng: random.Random) -> list[float]:
    times = [rng.expovariate(1 / rate)]  # seconds for each, not each second
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(1 / rate))
    return times
