"""The differential fuzzer: random programs and calls of attention, each beside dense attention in float64.

`python -m fuzz` runs it for a time (`make fuzz`); tests/test_fuzz.py runs a fixed budget.

    case.py         a case as plain data: its tensors, its mods, its calls
    session.py      what flexmod makes of it, call by call
    events.py       what happens to its objects in between: copies, writes
    hostile.py      tensors that are not plain
    dense.py        dense attention in torch, the truth among it
    check.py        how a call is judged; these six are the head of each script
    choices.py      what programs are drawn from: Hypothesis, a seed, choices written down; how these shrink
    values.py       typed values of a mod's text: how large, how exact, what they read
    operations.py   a text for each row of the table of operations, and for what is composed of rows
    mods.py         score mods and masks as text, with the tensors that they capture
    programs.py     programs (mods, dtypes, head dimensions, blocks), and calls of each
    kinds.py        the kinds of draws, by name
    numbers.py      0-d CPU tensors in mods, that change from call to call
    objects.py      copies, writes, tensors that are not plain
    extremes.py     large and tiny numbers, special integers
    jobs.py         one program in a worker process
    seeds.py        calls that failed once
    faults.py       faults that must be found
    script.py       a failing call as a script
    __main__.py     the long run
"""
