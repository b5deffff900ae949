"""Why an option of a plan is not offered by itself, in the words that a list of what is out and a refused plan use (`planner.space`)."""

PREDICT_ONLY = {
    "ncclx": "NCCLX is not part of PyTorch's releases",
    "copy_engine": "copy-engine collectives are not wired into the runtime",
}
"""Options that no code here executes."""
ASSUMED = "{}: what it saves is assumed; pin execution, or set search.predict_only, to allow it"
"""Why an execution that runs is not chosen by itself."""
UNPRICED = {"host_cached": "the search's program does not price fetching rows; pin it to allow it"}
"""Shardings that are executed and estimated, but chosen by a pin only."""
DRIFT = "replicas of the tables drift apart between averages, which changes training; pin layout.sync_every to allow it"
"""Why `sync_every` > 1 is never chosen by itself: it is always faster, and never the same mathematics."""
UNASKED = "below 16 bits training changes; pin precision, or set search.risk_budget, to allow it"
"""Why a format below 16 bits is never chosen by itself."""
UNASKED_WIRE = "what is sent changes training, and no risk is known of it; pin wire or wire_gradients to allow it"
"""Why a format on the wire is never chosen by itself, with a risk budget neither."""
EMULATED = ": it converts to another format and back; pin it to allow it"
