"""A small AMD GPU in NumPy: it executes the assembly that Triton writes for CDNA (gfx90a, gfx942, gfx950) and
RDNA 3, 3.5 and 4 (gfx1100, gfx1102, gfx1151, gfx1200, gfx1201).

Read it as the description of a machine, a room after the other:

    memory      bytes that lanes address: the arguments (bounds), LDS (races), scratch
    machine     a wave: lanes, registers, the execution mask, what it waits for; what differs between targets
    text        the assembly: instructions, labels, directives, arguments, lines of Python
    operands    how an instruction reads and writes: registers, constants, halves, signs
    scalar      one value for all lanes; branches, waits, barriers
    vector      one value for each lane: the table of arithmetic, comparisons, carries, division
    packed      two instructions in one
    crosslane   values that move between lanes
    matrix      tiles spread over the lanes
    loads       instructions on memory: constants, LDS, global, buffer, scratch
    program     an instruction finds its room; a program runs from barrier to barrier
    caches      what a wave sees of the others' stores; write-backs and invalidates
    group       the waves of a workgroup; a launch
    launch      in place of a GPU: Triton's launches on CPU tensors

Four checks beyond the numbers: `bounds` (each access lies in an argument's storage), `late` (nothing is used that an
earlier load has not been waited for), `race` (two waves, one word of LDS, no barrier), `unset` (what nobody wrote is
NaN). What the machine does not know is a fault as well. Memory is flat and workgroups run one after the other, unless
`caches=` asks for the caches of two dies or WGPs, and for workgroups that come between each other. It shows no times.
"""
