"""The generated program against the plain model.

``double``     both sides in float64
``trial``      one step of the program on simulated ranks or real processes
``outcome``    errors and differences, and the words for them
``verifying``  the steps in order: :func:`verify`
"""

from autopar.verifier.outcome import Measure, Verification, VerificationError
from autopar.verifier.verifying import verify, verify_traced

__all__ = ["Measure", "Verification", "VerificationError", "verify", "verify_traced"]
