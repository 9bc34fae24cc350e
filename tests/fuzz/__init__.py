"""The differential fuzzer: random programs and calls of attention, each beside dense attention in float64.

`python -m fuzz` runs it for a time (`make fuzz`); tests/test_fuzz.py runs a fixed budget.

    case.py         a call as plain data: its tensors, its mods, and what flexmod makes of it
    check.py        how a call is judged; the two of them are the head of each script
    choices.py      what programs are drawn from: Hypothesis, a seed, choices written down; how these shrink
    values.py       typed values of a mod's text: how large, how exact, what they read
    operations.py   a text for each row of the table of operations, and for what is composed of rows
    mods.py         score mods and masks as text, with the tensors that they capture
    programs.py     programs (mods, dtypes, head dimensions, blocks), and calls of each
    jobs.py         one program in a worker process
    seeds.py        calls that failed once
    faults.py       faults that must be found
    script.py       a failing call as a script
    __main__.py     the long run
"""
