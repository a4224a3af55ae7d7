# %% 1
def shared(jobs, length):
    return [job._replace(prompt=[5] * length + job.prompt) for job in jobs]
# %% 2
def compare(jobs):
    fast = {kind: Cost(0.25) for kind in SequenceType}
    two = run_fleet(one, flat, jobs, 1)
    quick = run_fleet(one, fast, jobs, 1)
    return fmean(o.latency for o in two), fmean(o.latency for o in quick)
