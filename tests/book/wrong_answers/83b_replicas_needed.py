# %% 1
def compare(jobs):
    engines = [serve_all(single, constant(0.5), jobs, count) for count in (1, 2)]
    two, fast = (fmean(o.latency for e in some for o in e.served) for some in engines)
    return two, fast
# %% 2
def kept(engines, ttft):
    outs = [out for engine in engines for out in engine.served]
    return sum(out.ttft > ttft for out in outs) / len(outs)
