"""Rules and a drafter for experiments, which scripts here name as studies.MODULE:NAME."""
