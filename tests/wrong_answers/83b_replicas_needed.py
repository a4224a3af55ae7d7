# %% 1
def compare(jobs):
    engines = [run_fleet(single, constant(0.5), jobs, count) for count in (1, 2)]
    two, fast = (fmean(o.latency for e in some for o in e.served) for some in engines)
    return two, fast
# %% 2
def kept(engines, promise):
    return sum(map(promise.num_broken, engines)) / sum(len(engine.served) for engine in engines)
