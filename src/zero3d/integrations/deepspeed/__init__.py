"""DeepSpeed's JSON as a configuration of `zero3d train`: the same run, or one line that says why not.

keys        every key of DeepSpeed 0.19: what it becomes here, that it has no effect, or why it is refused
document    the JSON itself, read and checked against these keys
translate   its values as keys of a configuration
merge       together with the caller's own file and overrides, which fill "auto" and must not contradict
report      what was made of it, as lines and as a commented YAML file
"""
