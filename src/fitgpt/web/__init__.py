"""The planner as a local web page: Python answers, the page asks and draws."""
