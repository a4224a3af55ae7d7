# %% 1
def follow_up(job, seconds, more):
    return job._replace(at=job.at + seconds, num_prompt_tokens=job.num_prompt_tokens + more)
# %% 2
def rate_for(wait, service):
    return wait / (service + wait) / service
