# %% 1
class Places:
    def __init__(self, device, num_places):
        self.device = device
        self.hosts = deque(np.empty(3, int) for _ in range(num_places))

    def send(self, there, values):
        if self.device.queue:  # waits at every step
            self.device.run()
        self.hosts.rotate()
        self.hosts[0][:] = values
        self.device.copy(there, self.hosts[0])
# %% 2
def bytes_sent(sizes: list[int]) -> int:
    return -(-sum(sizes) // 16) * 16  # only the whole
