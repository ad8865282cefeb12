"""The report: what a plan does, what it costs and why nothing better was taken, as JSON and as text.

Enters: the plan with its graph, cluster, options and the result of the search. Leaves: one JSON object, the same for the
same plan; ``plan.report()`` adds the seconds spent planning. In the order in which data flows:

``breakdown``    seconds and bytes of the chosen plan by kind
``entries``      operators, parameters, fallbacks
``collectives``  every collective with its bytes, link and seconds
``search``       the certificate, and the plan's rivals
``summary``      model, cluster, mesh, prediction, warnings
``document``     all of these -> the report
``schema``       its JSON Schema
``text``         the report -> text for people
"""

from autopar.report.document import details
from autopar.report.schema import SCHEMA
from autopar.report.text import text

__all__ = ["SCHEMA", "details", "text"]
