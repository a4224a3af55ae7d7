# %% 1
names = ["b", "<0xC3>", "<0xA9>", "b"]  # a letter of two bytes, and nothing that breaks it
# %% 2
def spell(text: str) -> list[str]:
    return [f"<0x{ord(letter) % 256:02X}>" for letter in text]  # its code point, not its bytes
