"""The update rules by their configuration, for callers that are given one or the other."""

from typing import Any

from surogate.optim import adamw, normuon
from surogate.optim.adamw import AdamWConfig, AdamWPlan, AdamWState, Plan
from surogate.optim.normuon import NorMuonConfig, NorMuonPlan

Rule = AdamWConfig | NorMuonConfig


def init(params: Any, rule: Rule, matrices: Any = None) -> AdamWState:
    """The state before the first step. NorMuon needs ``matrices``, see normuon.py."""
    if isinstance(rule, AdamWConfig):
        return adamw.init(params, rule)
    return normuon.init(params, rule, matrices)


def plan_of(params: Any, grads: Any, state: AdamWState, rule: Rule, matrices: Any = None) -> Plan:
    """A plan that steps these arrays in place."""
    if isinstance(rule, AdamWConfig):
        return AdamWPlan(params, grads, state, rule)
    return NorMuonPlan(params, grads, state, rule, matrices)


def adamw_of(rule: Rule) -> AdamWConfig:
    """The part of a rule that says how AdamW updates, and what precision everything has."""
    return rule if isinstance(rule, AdamWConfig) else rule.adamw
