"""From ``nn.Module`` to :class:`autopar.graph.OpGraph`, in the order in which data flows.

``examples``  the user's example inputs, bound to the model's forward and flattened; which dims are the batch
``capture``   torch.export on stand-in tensors without data -> an fx graph
``places``    tensors that the program may write into and the views between them -> pure values
``targets``   what must be known of torch's operators by name
``lower``     the fx graph, node by node -> operators and values
``blocks``    repeated blocks by module path and structure
``batch``     a second trace at another batch size -> the literals that follow the batch
``tracer``    the steps in order: :func:`trace`, the only public function
"""

from autopar.tracing.tracer import Traced, trace

__all__ = ["Traced", "trace"]
