"""Mode serve with several replicas: engines in processes of their own behind one router."""
