"""The metrics of metrics.jsonl: names, units and meanings, and the names that TRL and verl use.

docs/metrics.md is made from this table. A name with `*` stands for several: `reward/*` is one
metric for each reward term.
"""

import fnmatch
from typing import NamedTuple


class Metric(NamedTuple):
    """One metric; `trl` and `verl` are empty where those have no such metric."""

    name: str
    unit: str
    help: str
    trl: str = ""
    verl: str = ""


METRICS = tuple(Metric(*row) for row in (
    ("step", "", "index of the step, from 0"),
    ("reward/mean", "reward", "mean over the step's sequences, also those that rl.filter leaves "
     "out", "reward", "critic/rewards/mean"),
    ("reward/std", "reward", "standard deviation over the step's sequences", "reward_std"),
    ("reward/overlong", "reward", "mean penalty on length; with rl.overlong=soft"),
    ("reward/nonzero_advantage_fraction", "fraction", "groups whose rewards, without penalties, "
     "give an advantage",
     "1 - frac_reward_zero_std"),
    ("reward/failures", "responses", "responses with a term that failed and counts as "
     "reward.on_failure"),
    ("reward/*", "reward", "mean of one reward term, before its weight", "rewards/*/mean"),
    ("loss", "", "policy loss, mean over the last epoch's updates", "loss", "actor/pg_loss"),
    ("heldout/loss", "nats", "mean negative log-probability of held-out response tokens; sft.py",
     "eval_loss", "val/loss"),
    ("grad_norm", "", "global norm of the gradient before clipping", "grad_norm",
     "actor/grad_norm"),
    ("learning_rate", "", "rate of the update, mean over those of the last epoch", "learning_rate",
     "actor/lr"),
    ("applied", "0 or 1", "1 if every update of the step was finite and so applied; others "
     "are skipped"),
    ("policy/entropy", "nats", "mean entropy of the learner's distribution at response tokens, "
     "with temperature, without truncation; as all of policy/* and kl/*, over groups that the "
     "update reads: without an advantage only if the KL, rl.entropy or a teacher needs them",
     "entropy", "actor/entropy"),
    ("policy/clip_fraction", "fraction", "response tokens whose ratio rl.loss clips; 0 where "
     "every ratio is 1",
     "clip_ratio/region_mean", "actor/pg_clipfrac"),
    ("policy/ratio_mean", "", "mean ratio of a response token's probability to that under the "
     "policy that sampled; exactly 1 with one update on a rollout and "
     "learner.old_logprob=learner"),
    ("policy/ratio_max", "", "largest such ratio, over all updates of the last epoch; 1 where "
     "the mean is"),
    ("policy/correction_fraction", "fraction", "response tokens whose weight rl.correction cuts"),
    ("policy/ess", "fraction", "effective sample size of rl.correction's weights w over n tokens, "
     "(sum w)^2 / (n sum w^2); 1 where all weigh alike"),
    ("kl/reference", "nats", "k3 estimate of the KL to the initial policy, with rl.kl > 0; "
     "with rl.kl_in=reward that of rl.kl_estimator", "kl",
     "actor/kl_loss"),
    ("kl/teacher", "nats", "k1 estimate of the KL from the policy to the teacher; with rl.teacher"),
    ("kl/update", "nats", "k3 estimate of the KL from the policy that sampled to the current one",
     "", "actor/ppo_kl"),
    ("response/length_mean", "tokens", "mean length of responses", "completions/mean_length",
     "response_length/mean"),
    ("response/length_max", "tokens", "longest response", "completions/max_length",
     "response_length/max"),
    ("response/clipped_fraction", "fraction", "responses that reached rollout.max_new_tokens "
     "without a stop token", "completions/clipped_ratio", "response_length/clip_ratio"),
    ("rollout/tokens", "tokens", "response tokens that the step generated",
     "num_tokens (running sum)"),
    ("rollout/batches", "count", "rollouts of the step: 1, and those that rl.filter adds"),
    ("rollout/tokens_per_second", "tokens/s", "response tokens over time/rollout", "",
     "perf/throughput (whole step)"),
    ("rollout/accept_length", "tokens", "mean tokens per row and round, the actor's own "
     "included; 1 is plain decoding"),
    ("rollout/acceptance_rate", "fraction", "drafted tokens that were accepted"),
    ("rollout/drafted", "tokens", "draft tokens verified"),
    ("rollout/accepted", "tokens", "draft tokens accepted"),
    ("draft/*/drafted", "tokens", "draft tokens of one drafter that were verified"),
    ("draft/*/accepted", "tokens", "draft tokens of one drafter that were accepted"),
    ("draft/*/drafted_share", "fraction", "its share of all drafted tokens"),
    ("draft/*/accepted_share", "fraction", "its share of all accepted tokens"),
    ("rollout/rounds", "rounds", "rounds of draft, verify and commit, summed over shards"),
    ("rollout/launches", "launches", "compiled loops of up to rollout.rounds_per_launch rounds"),
    ("rollout/packed", "tokens", "tokens that verification ran over, roots and padding included"),
    ("rollout/occupancy", "fraction", "slots that held an unfinished sequence, mean over rounds"),
    ("rollout/clamped_rounds", "rounds", "rounds whose settings were outside the bounds of spec"),
    ("rollout/nonfinite_drafts", "rounds", "rounds in which the drafter's scores were not finite"),
    ("rollout/calibration_error", "fraction", "mean absolute difference of estimated and "
     "actual acceptance"),
    ("rollout/reliability", "list", "draft tokens, mean estimate and accepted share of each bin"),
    ("rollout/top_p_mass", "fraction", "mean probability that top-k and top-p keep"),
    ("rollout/logprob", "nats", "mean log-probability of response tokens in the rollout"),
    ("rollout/logprob_gap", "nats", "mean absolute difference of the rollout's and the learner's "
     "log-probabilities of response tokens that the policy to update drew; about 1e-6 in float32, "
     "about 0.02 in bfloat16",
     "sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean"),
    ("rollout/logprob_gap_max", "nats", "largest such difference",
     "sampling/sampling_logp_difference/max", "training/rollout_probs_diff_max"),
    ("rollout/logprob_gap_tokens", "tokens", "response tokens over which the two above are taken"),
    ("rollout/passes", "count", "passes of the step; with rollout.quota"),
    ("rollout/in_flight", "count", "groups that began and go on in the next step; with "
     "rollout.quota"),
    ("stale/mean", "steps", "mean age of the tokens of the step's complete groups: version of the "
     "policy that is "
     "updated less that of the one that drew them; with rollout.quota"),
    ("stale/worst", "steps", "age of the oldest of them; with rollout.quota"),
    ("stale/partial", "fraction", "complete responses with tokens of more than one policy; with "
     "rollout.quota"),
    ("spec/lossy", "0 or 1", "1 if the verification rule changes the distribution of tokens"),
    ("control/draft_depth", "tokens", "mean draft depth of a round"),
    ("control/verify_tokens", "tokens", "mean tokens that one verification ran over"),
    ("control/drafting", "fraction", "rounds with a draft"),
    ("control/predicted_seconds", "s", "predicted duration of the step's launches"),
    ("control/plain_seconds", "s", "predicted duration of the same tokens without drafts"),
    ("control/speculation_seconds", "s", "predicted cost of drafts and their verification"),
    ("control/launches", "list", "what each launch ran"),
    ("eval/accuracy", "fraction", "avg@k on the held-out problems, after the step; every "
     "eval.every steps, as all of eval/*", "", "val-core/*/acc/mean@N"),
    ("eval/accuracy_low", "fraction", "lower end of its 95 % interval"),
    ("eval/accuracy_high", "fraction", "upper end"),
    ("eval/pass_at_*", "fraction", "pass@k, its interval's ends with _low and _high", "",
     "val-core/*/acc/best@N/mean"),
    ("eval/best_step", "steps", "completed steps of the best evaluation so far, whose checkpoint "
     "is kept"),
    ("eval/length_mean", "tokens", "mean length of the responses"),
    ("eval/clipped_fraction", "fraction", "responses that reached rollout.max_new_tokens"),
    ("eval/accept_length", "tokens", "as rollout/accept_length, in the evaluation"),
    ("time/launches", "list", "seconds of each launch"),
    ("time/cost_error", "fraction", "error of control/predicted_seconds: absolute errors of "
     "launches over their seconds; below 0.2 on a quiet machine"),
    ("time/saved", "s", "control/plain_seconds minus the measured seconds of the step's launches, "
     "which are time/rollout without prefill and work of the host; where nothing is drafted, the "
     "error of the prediction. control.policy=fixed predicts nothing: there plain rounds cost what "
     "they did at start-up"),
    ("time/spent", "s", "predicted cost of drafts and of verifying them, beyond plain rounds"),
    ("time/regret", "s", "time lost against plain decoding, launch by launch"),
    ("time/step", "s", "the whole step", "step_time", "timing_s/step"),
    ("time/rollout", "s", "generation", "", "timing_s/gen"),
    ("time/prefill", "s", "prefill, a part of time/rollout"),
    ("time/reward", "s", "rewards", "", "timing_s/reward"),
    ("learn/tokens_per_second", "tokens/s", "tokens of prompts and responses through the update "
     "and its log-probabilities, on each device"),
    ("learn/mfu", "fraction", "6 FLOPs per parameter and token of the policy update, over "
     "what the device could do; if its peak is known (runtime/hardware.py)", "", "perf/mfu/actor"),
    ("time/learn", "s", "policy update and publishing", "", "timing_s/update_actor"),
    ("time/eval", "s", "the evaluation after the step, no part of time/step", "",
     "timing_s/testing"),
    ("time/save", "s", "the checkpoint before the step, no part of time/step: copying it to host "
     "memory, and waiting for the save before; it is written in the background", "",
     "timing_s/save_checkpoint"),
    ("time/distill", "s", "training and checks of the drafter"),
    ("time/distill_updates", "s", "updates of the drafter, a part of time/distill"),
    ("time/speculation_net", "s", "running sum of time/saved minus time/distill"),
    ("time/startup", "s", "start-up, in the first step after it"),
    ("time/profiling", "s", "measuring what rounds cost, a part of time/startup"),
    ("time/unix", "s", "Unix time at which the step ended"),
    ("memory/peak_bytes", "bytes", "peak resident memory of the process", "",
     "perf/max_memory_allocated_gb (device)"),
    ("memory/save_bytes", "bytes", "the process's copy of the checkpoint before the step in host "
     "memory, until it is written"),
    ("compilations", "count", "programs compiled in the step; 0 after warm-up"),
    ("checksum/policy", "", "checksum of the weights that sampled"),
    ("checksum/drafter", "", "checksum of the drafter's weights"),
    ("version/policy", "step", "step whose update made the weights that sampled"),
    ("version/drafter", "count", "version of the drafter's weights"),
    ("drafter/fault", "", "name of the detected fault, if any"),
    ("drafter/faults", "count", "faults of the drafter so far"),
    ("drafter/disabled", "0 or 1", "1 while drafting is off because of a fault"),
    ("distill/updates", "count", "updates of the drafter in the step"),
    ("distill/applied", "0 or 1", "1 if every one of them was finite"),
    ("distill/loss", "", "loss of the last update"),
    ("distill/grad_norm", "", "gradient norm of the last update"),
    ("distill/accept_length", "tokens", "accept length on the training batch"),
    ("distill/alpha/*", "fraction", "acceptance rate by draft depth, before the updates"),
    ("distill/acceptance", "fraction", "mean chance that a first draft is accepted; as the "
     "three below, only with distill.when=trigger"),
    ("distill/entropy", "nats", "the actor's mean entropy at these tokens"),
    ("distill/unexplained", "fraction", "acceptance a minus a0 + slope (h - h0), where h is "
     "entropy and the step after the last training gave a0, h0 and the slope; negative is a fall"),
    ("distill/fall", "fraction", "running mean of distill/unexplained over a0; below "
     "-distill.threshold, a training starts"),
    ("distill/buffer_bytes", "bytes", "kept features of rollouts"),
))

def find(name: str) -> Metric | None:
    """Returns the metric called `name`, an exact name before a pattern; None if there is none."""
    exact = (metric for metric in METRICS if metric.name == name)
    return next(exact, None) or next(
        (metric for metric in METRICS if fnmatch.fnmatchcase(name, metric.name)), None)
