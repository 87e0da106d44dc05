"""The state of a run: all that a step changes, and nothing else."""

from flax import struct

from specrl_jax.data.prompt_order import PromptHistory
from specrl_jax.distill.lifecycle import LifecycleState
from specrl_jax.rl.learner import LearnerState
from specrl_jax.rollout.state import PublishedPolicy, Speculation
from specrl_jax.structs import Json, Rollout


class TrainState(struct.PyTreeNode):
    """A run between two steps. Values may share leaves: only an update donates, its learner's.

    `step` counts complete steps, `bad_steps` the last updates that were not finite; `best` is the
    best evaluation so far (its step, accuracy and what it evaluated), if there was any.
    """

    step: int
    bad_steps: int
    learner: LearnerState  # of the policy: parameters and optimiser
    policy: PublishedPolicy  # what rollouts read
    drafter: LifecycleState  # its learner, published and last good versions, features
    speculation: Speculation  # controller, acceptance, costs, earlier responses
    prompts: PromptHistory  # how many were drawn, and how often each was solved
    in_flight: Rollout | None = None  # groups that began and are not trained; rollout.quota
    best: Json | None = struct.field(pytree_node=False, default=None)
