"""What explaining gives to the core: see :mod:`retrograd.core.plugins`."""

PROVIDES = {
    "sources": "retrograd.explaining.facts.sources:SOURCES",
    "watches": "retrograd.explaining.facts.watches:WATCHES",
    "explain": "retrograd.explaining.findings.explain:explain",
    "explain_for_page": "retrograd.explaining.card.describe:explain_for_page",
    "comparison_page": "retrograd.explaining.views.comparing.comparison_page:build_page",
    "commands": "retrograd.explaining.launch.commands:COMMANDS",
}
