"""What shipped policies say of starvation where their classes do not say it themselves."""

STARVES = {
    "plugins.order.priority.Priority": "while more urgent requests keep coming",
    "plugins.order.sjf.Sjf": "long requests wait while shorter ones keep coming",
    "plugins.order.srtf.Srtf": "long requests wait while shorter ones keep coming",
    "plugins.order.trail.Trail": "long requests wait while shorter ones keep coming",
    "plugins.order.slack.Slack": "without a deadline a request waits while others have one",
    "plugins.order.longest_prefix.LongestPrefix": "who has no match waits for who has one",
    "plugins.order.dfs_weight.DfsWeight": "a lighter subtree waits while a heavier one is refilled",
    "plugins.order.dlpm.Dlpm": "without a match a request waits until others used up their quantum",
    "plugins.batching.prefill_first.PrefillFirst": "streams stand still while prompts keep coming",
}

BOUNDS_S = {
    "plugins.order.priority_ageing.PriorityAgeing": 90.0,  # 9 levels of 10 s
}

BOUNDS_STEPS = {
    "plugins.order.mlfq.Mlfq": 1000,  # promote_after
}
