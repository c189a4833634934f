"""What explaining gives to the core: see :mod:`retrograd.core.plugins`."""

PROVIDES = {
    "sources": "retrograd.explaining.facts.sources:SOURCES",
    "watches": "retrograd.explaining.facts.watches:WATCHES",
    "explain": "retrograd.explaining.findings.explain:explain",
    "explain_gradients": "retrograd.explaining.findings.explain:explain_with_reasons",
    "comparison_page": "retrograd.explaining.views.comparing.comparison_page:build_page",
    "commands": "retrograd.explaining.launch.commands:COMMANDS",
}
