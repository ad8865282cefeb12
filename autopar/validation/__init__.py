"""Published runs, predicted: how far the cost models are from what others measured.

``runs`` (CSV) -> ``jobs`` (model, cluster, degrees; ``elsewhere``, ``hardware``, ``stacks``) -> ``models`` (traced) ->
``parts`` (priced) -> ``prediction`` (seconds, bytes) -> ``statistics`` -> ``validating`` (the document). ``splits`` says which
rows the constants were fitted on.
"""

from autopar.validation.validating import document, outcomes, text, validate

__all__ = ["document", "outcomes", "text", "validate"]
