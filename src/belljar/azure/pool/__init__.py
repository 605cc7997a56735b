"""Sessions that live in a session pool of Azure Container Apps, behind the contract of `kernels/base.py`.

`credentials` proves who we are, `transport` sends one request, `data_plane` knows the pool's routes and shapes,
`results` turns an execution's answer into events, `mirror` keeps the session folder and the pool's files alike,
`kernel` runs cells, `checks` is for `belljar doctor`. Imported only when such a session starts.
"""

from belljar.azure.pool.kernel import AzureKernel, start_azure

__all__ = ["AzureKernel", "start_azure"]
