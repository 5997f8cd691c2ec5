"""What a result says in words: findings, the summary, what is normal, what could not be judged. No layout.

`tell` computes what a finished result says, each sort by the module of its name: `mistakes` what is wrong, `next` the
command to go on with. Before, `pipeline` asks for `notes` and for `doubts`; `tensors` are an audit's. `places` and
`words` put ops, names and numbers.
"""
