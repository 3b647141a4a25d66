"""Why a trainer's logprobs are not the sampler's: `LLM.diagnose`."""

from rollout.diagnosis.causes import Cause, Diagnosis, Part
from rollout.diagnosis.diagnose import Trainer, diagnose
from rollout.diagnosis.records import SampleRecord

__all__ = ["Cause", "Diagnosis", "Part", "SampleRecord", "Trainer", "diagnose"]
