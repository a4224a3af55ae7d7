# %% 1
def rate_for(wait, service):
    return wait / (service + wait) / service
# %% 2
def largest_budget(limit, step, token):
    return int((limit - step) / token) // 2
