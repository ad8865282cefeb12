"""The report: what a plan does, what it costs and why nothing better was taken, as JSON and as text.

Enters: the plan with its graph, cluster, options and the result of the search. Leaves: one JSON object, the same for the
same plan; ``plan.report()`` adds the seconds spent planning. In the order in which data flows:

``views``        each stage as the rest reads it
``breakdown``    seconds and bytes of a stage by kind
``entries``      operators, parameters, fallbacks
``summary``      model, cluster, mesh, work, warnings
``collectives``  every collective with its bytes, link and seconds
``stages``       the stages, and the predicted step
``timeline``     when each pipeline rank does what
``search``       the certificate, and the plan's rivals
``neighbours``   why each choice is not made otherwise
``document``     all of these -> the report
``schema``       its JSON Schema
``tables``, ``units``  rows and numbers as people read them
``text``         the report -> text for people
"""

from autopar.report.document import details
from autopar.report.schema import SCHEMA
from autopar.report.text import text

__all__ = ["SCHEMA", "details", "text"]
